"""Lines as a run goes, and a progress bar where there is a terminal."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import logging
import signal
import sys
import threading
from typing import Any

try:
  import rich.console
  import rich.progress
  import rich.table
except ImportError:  # the extra `bench` is not installed
  rich = None


class Console:
  """Writes lines to standard output, a bar below them on a terminal.

  In a pipe or a file nothing but the lines is written.
  """

  def __init__(self) -> None:
    on_terminal = rich is not None and sys.stdout.isatty()
    self._rich = rich.console.Console(highlight=False) if on_terminal else None
    self._update: Callable[..., None] = lambda **_: None

  def line(self, text: str = "", *, bad: bool = False) -> None:
    """Writes one line; red if it tells of a failure."""
    if self._rich is None:
      print(text, flush=True)
    else:
      style = "bold red" if bad else None
      self._rich.print(text, style=style, markup=False, soft_wrap=True)

  @contextlib.contextmanager
  def progress(self, total: int) -> Iterator[None]:
    """A bar of `total` steps; see `step` and `doing`."""
    if self._rich is None:
      yield
      return
    columns = (
      rich.progress.TextColumn("{task.description}"),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeElapsedColumn(),
    )
    before = self._update
    with rich.progress.Progress(
      *columns, console=self._rich, transient=True
    ) as bar:
      task = bar.add_task("", total=total)
      self._update = functools.partial(bar.update, task)
      try:
        yield
      finally:
        self._update = before

  def doing(self, text: str) -> None:
    """Says on the bar what is under way."""
    self._update(description=text)

  def step(self) -> None:
    """Moves the bar by one."""
    self._update(advance=1)

  def table(
    self,
    title: str,
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    numeric: Sequence[str] = (),
  ) -> None:
    """Writes a table; columns named in `numeric` are flush right."""
    if self._rich is not None:
      table = rich.table.Table(title=title, title_justify="left")
      for name in header:
        table.add_column(name, justify="right" if name in numeric else "left")
      for row in cells:
        bad = any(cell.startswith("FAILED") for cell in row)
        table.add_row(*row, style="bold red" if bad else None)
      self._rich.print(table)
      return
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    self.line(title)
    for row in (header, ["-" * width for width in widths], *cells):
      justified = (
        cell.rjust(width) if name in numeric else cell.ljust(width)
        for name, cell, width in zip(header, row, widths, strict=True)
      )
      self.line("  ".join(justified).rstrip())


class Interrupt:
  """Context that remembers that Ctrl-C was pressed.

  KeyboardInterrupt that is raised while a kernel calls back into Python may
  come out of JAX as another exception; `pressed` tells. Out of the context it
  comes as KeyboardInterrupt.
  """

  def __init__(self) -> None:
    self.pressed = False
    self._before: Any = None

  def __enter__(self) -> "Interrupt":
    # Only the main thread may set handlers, and only it gets the signal.
    if threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGINT, self._handle)
    return self

  def __exit__(self, _, error: BaseException | None, *__) -> None:
    if self._before is not None:
      signal.signal(signal.SIGINT, self._before)
    logging.disable(logging.NOTSET)
    if self.pressed and isinstance(error, Exception):
      raise KeyboardInterrupt from None

  def _handle(self, *_) -> None:
    self.pressed = True
    # JAX logs the traceback of whatever leaves a callback.
    logging.disable()
    outer = getattr(self._before, "__self__", None)
    if isinstance(outer, Interrupt):
      outer.pressed = True
    raise KeyboardInterrupt
