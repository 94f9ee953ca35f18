"""A warpgroup that runs PTX: what `cp_async` writes, on NumPy arrays.

All threads do each instruction before any does the next one. So it does not
show what threads do to each other in between; `Memory.writers` shows what a
warp reads that another one wrote.
"""

from collections.abc import Sequence
import dataclasses
import re

import numpy as np

THREADS, LANES = 128, 32
_THREAD = np.arange(THREADS)
_INSTRUCTION = re.compile(r"(?:@(\w+) )?([\w.:]+)\s*(.*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


@dataclasses.dataclass
class Memory:
  """Bytes, and the warp that last wrote each; -1 for none.

  Attributes:
    data: uint8 [size].
    writers: int [size].
  """

  data: np.ndarray
  writers: np.ndarray

  @staticmethod
  def of(data: np.ndarray) -> "Memory":
    data = data.view(np.uint8).copy()
    return Memory(data, np.full(data.size, -1))


@dataclasses.dataclass
class Warpgroup:
  """Runs text, with addresses for $0, $1, ....

  Attributes:
    shared, global_: memory; addresses are indices.
    addresses: what $0, $1, ... are.
  """

  shared: Memory
  global_: Memory
  addresses: Sequence[int]

  def run(self, text: str) -> None:
    """All instructions of a block.

    Raises:
      ValueError: an instruction that this does not know.
      AssertionError: an address that is not aligned or not in memory, or what
        another warp wrote is read without a barrier of all.
    """
    self._registers: dict[str, np.ndarray] = {}
    for line in text.splitlines():
      if line in "{}" or line.startswith(".reg"):
        continue
      guard, name, rest = _INSTRUCTION.fullmatch(line).groups()
      active = self._registers[guard] if guard else np.full(THREADS, True)
      self._do(name, _OPERAND.findall(rest), active)

  def _do(self, name: str, operands: list[str], active: np.ndarray) -> None:
    if name.startswith("bar.warp.sync"):
      return
    if name.startswith("cp.async"):
      self._copy(*operands, active)
    elif name.startswith("ld.shared"):
      self._load(*operands, active)
    elif name.startswith("st.shared"):
      self._store(*operands, active)
    else:
      assert active.all()
      target, *sources = operands
      values = [self._value(x) for x in sources]
      self._registers[target] = _compute(name, values)

  def _value(self, operand: str) -> np.ndarray:
    if operand in self._registers:
      return self._registers[operand]
    if operand == "%tid.x":
      # Any of a block's warpgroups.
      return _THREAD + 2 * THREADS
    if operand.startswith("$"):
      return np.full(THREADS, self.addresses[int(operand[1:])])
    return np.full(THREADS, int(operand, 0))

  def _address(self, operand: str) -> np.ndarray:
    name, _, offset = operand.strip("[]").partition("+")
    return self._value(name) + int(offset or 0)

  def _copy(self, target, source, size, active) -> None:
    size = int(size)
    to, of = self._address(target), self._address(source)
    for thread in _THREAD[active]:
      _put(self.shared, to[thread], _at(self.global_, of[thread], size), thread)

  def _load(self, targets, source, active) -> None:
    names = re.findall(r"\w+", targets)
    address = self._address(source)
    values = np.zeros((len(names), THREADS), np.int64)
    for thread in _THREAD[active]:
      start, size = address[thread], 4 * len(names)
      values[:, thread] = _at(self.shared, start, size).view(np.uint32)
      writers = self.shared.writers[start : start + size]
      assert (writers == thread // LANES).all(), "of another warp, or of none"
    self._registers |= dict(zip(names, values))

  def _store(self, target, sources, active) -> None:
    values = [self._value(x) for x in re.findall(r"\w+", sources)]
    address = self._address(target)
    for thread in _THREAD[active]:
      words = np.array([x[thread] for x in values], np.uint32)
      _put(self.shared, address[thread], words.view(np.uint8), thread)


def _at(memory: Memory, start: int, size: int) -> np.ndarray:
  assert 0 <= start <= memory.data.size - size and start % size == 0
  return memory.data[start : start + size].copy()


def _put(memory: Memory, start: int, value: np.ndarray, thread: int) -> None:
  _at(memory, start, value.size)
  memory.data[start : start + value.size] = value
  memory.writers[start : start + value.size] = thread // LANES


_COMPARE = {"lt": np.less, "eq": np.equal, "ne": np.not_equal}
_ARITHMETIC = {
  "mov": lambda a: a,
  "cvt": lambda a: a,
  "cvta": lambda a: a,
  "add": np.add,
  "sub": np.subtract,
  "mul": np.multiply,
  "mad": lambda a, b, c: a * b + c,
  "and": lambda a, b: a & b,
  "xor": np.bitwise_xor,
  "shl": np.left_shift,
  "shr": np.right_shift,
  "selp": lambda a, b, p: np.where(p, a, b),
  "shf": lambda low, high, by: ((high << 32 | low) >> by) & 0xFFFFFFFF,
}


def _compute(name: str, values: list[np.ndarray]) -> np.ndarray:
  kind, *rest = name.split(".")
  if kind == "setp":
    return _COMPARE[rest[0]](*values)
  if kind == "shfl":
    return _shuffled(*values)
  if kind not in _ARITHMETIC:
    raise ValueError(f"no such instruction here: {name}")
  found = _ARITHMETIC[kind](*values)
  is_predicate = rest == ["pred"]
  is_wide = rest[-1].endswith("64") or "wide" in rest
  if not is_predicate and not is_wide:
    assert (0 <= found).all() and (found < 2**32).all(), name
  return found


def _shuffled(value, by, clamp, members) -> np.ndarray:
  """Down the lanes of a warp; the last ones keep their own."""
  assert (clamp == 31).all() and (members == 0xFFFFFFFF).all()
  source = np.where(_THREAD % LANES + by < LANES, _THREAD + by, _THREAD)
  return value[source]
