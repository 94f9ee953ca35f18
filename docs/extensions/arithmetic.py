"""Arithmetic in a page: numbers and operators, nothing else."""

import ast
import operator
import re

from docs.extensions import lookup, show

_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
  ast.USub: operator.neg,
}
_FORMAT = re.compile(r",?(\.\d+)?[dfgeE%]|,")


def calc(text: str) -> str:
  """The value of an expression; a last word such as ".1f" is its format.

  Raises:
    UnknownError: it is no arithmetic.

  Example:
    >>> from docs.extensions import arithmetic
    >>> arithmetic.calc("2 * 4096**3 / 1e9 .1f")
    '137.4'
  """
  expression, _, last = text.strip().rpartition(" ")
  if not (expression and _FORMAT.fullmatch(last)):
    expression, last = text.strip(), ""
  try:
    value = _evaluate(ast.parse(expression, mode="eval").body)
  except (SyntaxError, ArithmeticError) as error:
    raise lookup.UnknownError(
      f"can't compute {expression!r}: {error}"
    ) from None
  return format(value, last) if last else show.number(value)


def _evaluate(node: ast.expr) -> float:
  match node:
    case ast.Constant(value=int() | float() as number):
      return number
    case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
      return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
    case ast.UnaryOp(op=ast.USub(), operand=operand):
      return -_evaluate(operand)
  raise lookup.UnknownError(
    f"want numbers and + - * / // % **, got {ast.unparse(node)!r}"
  )
