"""The live screen of `tpu_ops top`, by textual: it has tables of any length, keys, and tests that press them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import Worker

from tpu_ops import texts
from tpu_ops.cli import interrupts, output
from tpu_ops.errors import ExitCode, printable
from tpu_ops.runs import usage, usage_lines
from tpu_ops.runs.usage_lines import COLUMNS, Line
from tpu_ops.runs.usage_poll import Poll

#: Seconds between two pictures; the second number holds until each worker has answered.
_PICTURE, _FIRST = 1.0, 0.25
#: Maximum number of characters in a cell of these columns; the last line of the screen has the whole text.
_LONGEST = {"worker": 32, "run": 24, "person": 16, "state": 64, "holder": 48}
_STYLES = {usage.LOST: "red", usage.BROKEN: "yellow", usage.SILENT: "yellow", usage.OLD: "yellow", usage.FREE: "dim"}


def show(poll: Poll, target: str, every: float, fleet: Sequence[str]) -> int:
    """Show the screen until the user quits; return the exit code.

    Args:
        poll: The use of the workers' chips.
        target: The target in words.
        every: Seconds between two questions to a worker.
        fleet: The option --fleet for commands that the screen starts.
    """
    screen = Screen(poll, f"{target}, every {every:g} s", lambda verb, run: outside(verb, run, fleet))
    with interrupts.signals(lambda again: screen.end_soon()):
        screen.run()
    return screen.return_code or ExitCode.OK


def outside(verb: str, run: str, fleet: Sequence[str]) -> None:
    """Run ``tpu_ops VERB RUN`` in the plain terminal, and wait until the user has read what it printed."""
    # Ctrl-C ends the command, and then this function's wait, but not the screen.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        command = [sys.executable, "-m", "tpu_ops.cli.main", verb, *fleet, run]
        subprocess.run(command, check=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output.info("Enter goes back to top")
        sys.stdin.readline()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)


class _Table(DataTable[Text]):
    """The lines; Home and End move to the first and the last one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", "", show=False),
        Binding("end", "scroll_bottom", "", show=False),
    ]


class Screen(App[None]):
    """The screen.

    Args:
        poll: The use of the workers' chips; the screen runs it.
        what: What is shown, in words.
        command: Runs the command `logs` or `stacks` for a run, outside of the screen.
    """

    CSS = """
    #head, #detail, #filter { height: 1; }
    #head { background: $panel; }
    #detail { color: $text-muted; }
    #filter { border: none; padding: 0; display: none; }
    _Table { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "unfold", "unfold"),
        Binding("f", "fold", "unfold all"),
        Binding("less_than_sign", "sort(-1)", "sort", key_display="<"),
        Binding("greater_than_sign", "sort(1)", "sort", key_display=">"),
        Binding("R", "reverse", "reverse"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "no_filter", "", show=False),
        Binding("l", "command('logs')", "logs"),
        Binding("s", "command('stacks')", "stacks"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "interrupt", "", show=False, priority=True),
    ]

    def __init__(self, poll: Poll, what: str, command: Callable[[str, str], None]) -> None:
        super().__init__()
        self._poll, self._what, self._command = poll, what, command
        self._lines: list[Line] = []
        self._by, self._backwards, self._words, self._depth = "worker", False, "", 0
        self._toggled: set[tuple[str, ...]] = set()
        self._drawn, self._settled = (-1, 0.0), False
        self._polling: Worker[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- the parts of the screen ------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Create the parts of the screen."""
        # A timer can still tick while these parts are removed at the end, so that they are not looked up.
        self._head, self._detail = Static(id="head", markup=False), Static(id="detail", markup=False)
        self._table, self._filter = (
            _Table(cursor_type="row"),
            Input(placeholder="words, as in: ada stalled", id="filter"),
        )
        yield from (self._head, self._table, self._detail, self._filter, Footer())

    def on_mount(self) -> None:
        """Begin to ask the workers and to draw."""
        self._loop = asyncio.get_running_loop()
        self._polling = self.run_worker(self._poll.run(), exit_on_error=True)
        self._table.focus()
        self.draw()
        self.set_interval(_FIRST, self._tick)

    def _tick(self) -> None:
        version, at = self._drawn
        is_first = version != self._poll.version and self._poll.waiting
        if is_first or time.monotonic() - at >= _PICTURE:
            self.draw()

    def draw(self) -> None:
        """Draw the last known use of the chips."""
        self._drawn = (self._poll.version, time.monotonic())
        now = time.time()
        uses = list(self._poll.uses.values())
        self._lines = usage_lines.lines(
            uses,
            words=self._words,
            by=self._by,
            backwards=self._backwards,
            depth=self._depth,
            toggled=self._toggled,
        )
        self._fill([self._cells(line, now) for line in self._lines])
        waiting = len(self._poll.waiting)
        parts = [
            time.strftime("%H:%M:%S"),
            self._what,
            usage_lines.summary(uses) if uses else "",
            f"waiting for {texts.count(waiting, 'worker')}" if waiting else "",
            f"filter: {self._words}" if self._words else "",
            self._poll.problem,
        ]
        self._head.update(printable("  |  ".join(filter(None, parts))))
        self._describe(now)

    def _cells(self, line: Line, now: float) -> list[Text]:
        cells = usage_lines.cells(line, now)
        mark = ("\u25be " if line.is_open else "\u25b8 ") if line.opens else "  "
        cells["worker"] = "  " * line.depth + mark + cells["worker"]
        stalled = any(row.stall for row in line.rows)
        style = "bold red" if stalled or line.is_faulty else _STYLES.get(line.state, "")
        return [Text(_cut(column, cells[column]), style) for column in COLUMNS]

    def _fill(self, rows: list[list[Text]]) -> None:
        """Put rows into the table; keep the cursor on its line, and change only the cells that differ."""
        table, keys = self._table, ["\0".join(line.key) for line in self._lines]
        if not table.columns:
            for column in COLUMNS:
                # The heading has room for the mark of the order.
                table.add_column(f"{column.upper()}  ", key=column)
        for heading in table.columns.values():
            name = str(heading.key.value)
            mark = "" if name != self._by else " \u25b4" if self._backwards else " \u25be"
            heading.label = Text(f"{name.upper()}{mark or '  '}")
        if [key.value for key in table.rows] == keys:
            for key, cells in zip(keys, rows, strict=True):
                for name, cell in zip(COLUMNS, cells, strict=True):
                    if table.get_cell(key, name) != cell:
                        table.update_cell(key, name, cell, update_width=True)
            table.refresh()
            return
        chosen, at, top = self._chosen_key(table), table.cursor_row, table.scroll_y
        if at == 0 and not self._settled:
            # The user has not moved the cursor yet: do not follow the worker that happened to answer first.
            chosen = ""
        self._settled = not self._poll.waiting
        table.clear()
        for key, cells in zip(keys, rows, strict=True):
            table.add_row(*cells, key=key)
        table.move_cursor(row=keys.index(chosen) if chosen in keys else min(at, len(keys) - 1), scroll=False)
        table.scroll_to(y=top, animate=False)

    @staticmethod
    def _chosen_key(table: _Table) -> str:
        if not 0 <= table.cursor_row < table.row_count:
            return ""
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    @property
    def chosen(self) -> Line | None:
        """The line with the cursor; None if there is no line."""
        at = self._table.cursor_row
        return self._lines[at] if 0 <= at < len(self._lines) else None

    def _describe(self, now: float) -> None:
        """Show the whole text of the chosen line, of which the table may have cut a part."""
        line, text = self.chosen, ""
        if line:
            cells = usage_lines.cells(line, now)
            text = "  ".join(filter(None, (cells[name] for name in ("worker", "state", "holder"))))
            text += f"  fix: {fix}" if (fix := self._fix(line)) else ""
        self._detail.update(printable(text))

    def _fix(self, line: Line) -> str:
        use = self._poll.uses.get(line.rows[0].worker) if line.state == usage.LOST else None
        return output.on_fleet(use.reply.fix) if use else ""

    # --- keys -------------------------------------------------------------------------------------------------

    def on_data_table_row_selected(self) -> None:
        """Unfold or fold the line, after Enter or a click on the line with the cursor."""
        self.action_unfold()

    def on_data_table_row_highlighted(self) -> None:
        """Describe the line to which the cursor has moved."""
        self._describe(time.time())

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by a column whose heading was clicked; a second click reverses."""
        name = str(event.column_key.value)
        self._by, self._backwards = name, name == self._by and not self._backwards
        self.draw()

    def action_unfold(self) -> None:
        """Unfold or fold the line with the cursor."""
        if (line := self.chosen) and line.opens:
            self._toggled ^= {line.key}
            self.draw()

    def action_fold(self) -> None:
        """Unfold all lines into workers, then into cores, then fold them all."""
        self._depth = (self._depth + 1) % 3
        self._toggled.clear()
        self.draw()

    def action_sort(self, step: int) -> None:
        """Sort by the next or previous column."""
        self._by, self._backwards = COLUMNS[(COLUMNS.index(self._by) + step) % len(COLUMNS)], False
        self.draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._backwards = not self._backwards
        self.draw()

    def action_filter(self) -> None:
        """Let the user type the words of the filter."""
        self._filter.display = True
        self._filter.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the words typed so far."""
        self._words = event.value
        self.draw()

    def on_input_submitted(self) -> None:
        """Keep the filter, and go back to the table."""
        self._filter.display = False
        self._table.focus()

    def action_no_filter(self) -> None:
        """Remove the filter."""
        self._filter.value = ""
        self.on_input_submitted()

    async def action_command(self, verb: str) -> None:
        """Run a command for the run of the line with the cursor, outside of the screen."""
        line = self.chosen
        if not line or not line.run:
            self.notify("there is no run on this line", severity="warning")
            return
        # The command blocks the event loop: no answer may be waited for meanwhile.
        if self._polling:
            self._polling.cancel()
            await asyncio.gather(self._polling.wait(), return_exceptions=True)
        try:
            if self.is_headless:
                self._command(verb, line.run)
            else:
                with self.suspend():
                    self._command(verb, line.run)
        finally:
            self._polling = self.run_worker(self._poll.run(), exit_on_error=True)

    def action_interrupt(self) -> None:
        """Quit with the exit code of Ctrl-C."""
        self.exit(return_code=ExitCode.INTERRUPTED)

    def end_soon(self) -> None:
        """Quit after a signal, from any place in the main thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(self.action_interrupt)


def _cut(column: str, text: str) -> str:
    text, most = printable(text), _LONGEST.get(column, 32)
    return text if len(text) <= most else text[: most - 1] + "\u2026"
