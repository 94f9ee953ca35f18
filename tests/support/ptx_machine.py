"""A warpgroup that runs the few PTX instructions of `pallas_gemm.ptx`.

What Mosaic GPU would emit is computed at once, for all 128 threads: in place of
MLIR's values there are arrays of numpy.
"""

import re
import types

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
import numpy as np

from pallas_gemm import compat
from pallas_gemm.ptx import mlir

THREADS = 128


class Ref:
  """A window of memory: rows so many bytes apart, from an address on."""

  def __init__(self, address, shape=None, pitch=0, dtype=np.uint16):
    self.address, self.pitch, self.type = address, pitch, self
    self.shape, self.dtype = shape, np.dtype(dtype)

  @property
  def at(self):
    return _At(self)


class _At:
  """`ref.at[rows, columns]` of slices as `pl.ds` makes them."""

  def __init__(self, ref):
    self.ref = ref

  def __getitem__(self, index):
    ref, (rows, columns) = self.ref, index
    first = rows.start * ref.pitch + columns.start * ref.dtype.itemsize
    shape = rows.size, columns.size
    return Ref(ref.address + first, shape, ref.pitch, ref.dtype)


class Machine:
  """Global and shared memory, and the threads."""

  def __init__(self, monkeypatch, global_bytes, shared_bytes):
    self.globals = np.zeros(global_bytes, np.uint8)
    self.shared = np.zeros(shared_bytes, np.uint8)
    self.written = np.zeros(global_bytes, int)
    words = {
      "pitch": lambda ref: ref.pitch,
      "address": lambda ref: np.full(THREADS, ref.address),
      "shared_address": lambda ref: np.full(THREADS, ref.address),
      "thread": lambda: np.arange(THREADS),
      "i32": int,
      "extended": lambda x: x,
      "truncated": lambda x: x & 0xFFFFFFFF,
      "multiply_add": lambda x, factor, y: x * factor + y,
      "swizzled_type": lambda ref, atom: None,
      "asm": self.run,
      "bytes_behind": lambda address, count: address + count,
      "for_each": _for_each,
    }
    for name, value in words.items():
      monkeypatch.setattr(mlir, name, value)
    for name, value in _ARITHMETIC.items():
      monkeypatch.setattr(arith, name, value)
    monkeypatch.setattr(compat, "targets_gpu", lambda: True)
    monkeypatch.setattr(plgpu, "inline_mgpu", _inline)

  def run(self, text, constraints, *operands):
    """Runs a piece of PTX on all threads, one instruction after the other."""
    del constraints
    registers = {
      f"${i}": np.broadcast_to(np.asarray(x), (THREADS,))
      for i, x in enumerate(operands)
    }
    for line in text.strip().strip("{}").split(";"):
      line = " ".join(line.split())
      # What a branch leaves out, predicates of its own leave out here.
      if line and not re.match(r"\.reg|\w+:$|@\S+ bra ", line):
        self._instruction(line, registers)

  def _instruction(self, line, registers):
    active = np.ones(THREADS, bool)
    if line.startswith("@"):
      predicate, line = line[1:].split(" ", 1)
      active = registers[predicate].astype(bool)
    opcode, _, rest = line.partition(" ")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    kind, *modifiers = opcode.split(".")
    if kind in ("ld", "st"):
      return self._move(kind, modifiers, operands, registers, active)
    if kind == "bar":
      return None
    if kind == "cp":
      return self._copy(modifiers, operands, registers, active)
    if operands and operands[0].startswith("{"):  # mov.b32 {a, b}, word
      low, high = operands[0].strip("{}").split(", ")
      word = _value(operands[1], registers)
      registers[low], registers[high] = word & 0xFFFF, word >> 16
      return None
    if operands and operands[-1].startswith("{"):  # mov.b32 word, {a, b}
      low, high = (registers[x] for x in operands[1].strip("{}").split(", "))
      registers[operands[0]] = low | high << 16
      return None
    target, *sources = operands
    values = [_value(x, registers) for x in sources]
    result = _RULES[kind](modifiers, *values)
    old = registers.get(target, np.zeros(THREADS, np.int64))
    registers[target] = np.where(active, result, old)
    return None

  def _addresses(self, operand, registers):
    name, _, offset = operand.strip("[]").partition("+")
    return registers[name] + int(offset or 0)

  def _move(self, kind, modifiers, operands, registers, active):
    space, *vector, width = modifiers
    memory = self.shared if space == "shared" else self.globals
    count = int(vector[0][1:]) if vector else 1
    size = int(width[1:]) // 8
    places = operands if kind == "st" else operands[::-1]
    addresses = self._addresses(places[0], registers)
    assert not np.any(addresses[active] % (size * count))
    for i, name in enumerate(places[1].strip("{}").split(", ")):
      at = addresses[:, None] + size * i + np.arange(size)
      if kind == "ld":
        found = np.zeros(THREADS, np.int64)
        parts = memory[at[active]].astype(np.int64)
        found[active] = (parts << (8 * np.arange(size))).sum(1)
        registers[name] = np.where(active, found, registers.get(name, found))
        continue
      parts = registers[name][:, None] >> (8 * np.arange(size)) & 0xFF
      memory[at[active]] = parts[active]
      if space == "global":
        np.add.at(self.written, at[active], 1)

  def _copy(self, modifiers, operands, registers, active):
    if "async" not in modifiers or not operands:
      return
    to, source = (self._addresses(x, registers) for x in operands[:2])
    size = int(operands[2])
    assert size == 16 or "ca" in modifiers
    assert not np.any((to[active] | source[active]) % size)
    # What is behind so many bytes is not read, and zero.
    count = _value(operands[3], registers) if operands[3:] else size
    for i in range(size):
      read = active & (i < count)
      self.shared[to[active] + i] = 0
      self.shared[to[read] + i] = self.globals[source[read] + i]


def _inline(arg_types=()):
  del arg_types
  return lambda fn: lambda *refs: fn(None, *map(_as_register, refs))


def _as_register(x):
  if isinstance(x, Ref):
    return x
  item = types.SimpleNamespace(item=lambda: np.full(THREADS, int(x)))
  return types.SimpleNamespace(registers=item)


def _for_each(count, visit):
  """Of a count that all threads agree on."""
  for i in range(int(count.max())):
    visit(i)


def _value(operand, registers):
  if operand in registers:
    return registers[operand]
  return np.full(THREADS, int(operand, 0))


def _compare(modifiers, a, b, *both):
  rules = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
  }
  found = rules[modifiers[0]](a, b)
  return found & both[0].astype(bool) if both else found


def _permute(_, a, b, order):
  """The bytes of two words, counted from the lowest, that an order names."""
  both = a & 0xFFFFFFFF | (b & 0xFFFFFFFF) << 32
  found = np.zeros_like(a)
  for i in range(4):
    found |= (both >> 8 * (order >> 4 * i & 7) & 0xFF) << 8 * i
  return found


_RULES = {
  "setp": _compare,
  "and": lambda _, a, b: a & b,
  "add": lambda _, a, b: a + b,
  "mad": lambda _, a, b, c: a * b + c,
  "cvt": lambda how, a: a if how[0] == "s64" else a & 0xFFFFFFFF,
  "sub": lambda _, a, b: a - b,
  "xor": lambda _, a, b: a ^ b,
  "shl": lambda _, a, b: a << b,
  "min": lambda _, a, b: np.minimum(a, b),
  "max": lambda _, a, b: np.maximum(a, b),
  "bmsk": lambda _, a, b: ((1 << np.minimum(b, 32)) - 1) << a,
  "not": lambda _, a: ~a.astype(bool),
  "mov": lambda _, a: a,
  "selp": lambda _, a, b, p: np.where(p.astype(bool), a, b),
  "prmt": _permute,
}


# `arith` of arrays.
_ARITHMETIC = {
  "addi": lambda a, b: a + b,
  "subi": lambda a, b: a - b,
  "muli": lambda a, b: a * b,
  "divui": lambda a, b: a // b,
  "remui": lambda a, b: a % b,
  "andi": lambda a, b: a & b,
  "xori": lambda a, b: a ^ b,
  "minui": np.minimum,
  "minsi": np.minimum,
  "select": lambda p, a, b: np.where(p, a, b),
  "cmpi": lambda predicate, a, b: _COMPARISONS[predicate](a, b),
}
_COMPARISONS = {
  arith.CmpIPredicate.slt: np.less,
  arith.CmpIPredicate.ult: np.less,
}
