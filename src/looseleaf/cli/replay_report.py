"""What `looseleaf replay` prints: one result, or a sweep, as JSON, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.measure import Measurement
from rich.table import Table

from looseleaf.cli.extras import import_extra
from looseleaf.cli.machine import provenance
from looseleaf.cli.output import stdout_console
from looseleaf.errors import ConfigError
from looseleaf.lab.replay import ReplayResult
from looseleaf.lab.sweep import Cell, Outcome, Standing, standing_of

_SHARES = ("token_hit_rate", "waste", "lru_token_hit_rate", "optimum_token_hit_rate", "gap_closed")


@dataclass(frozen=True)
class Report:
    """A sweep that is over, or was stopped. `cells`: what was asked for, in order. `outcomes`: of these and of those
    that they are compared with. `has_standings`: compare them with LRU and the offline optimum."""

    cells: Sequence[Cell]
    outcomes: Mapping[Cell, Outcome]
    traces: Sequence[Path]
    has_standings: bool

    @property
    def failed(self) -> list[Outcome]:
        """Cells that were tried and have no result."""
        return [outcome for outcome in self.outcomes.values() if outcome.result is None]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each cell asked for that has a result, ready for JSON."""
        rows = []
        for cell in self.cells:
            outcome = self.outcomes.get(cell)
            if outcome is not None and outcome.result is not None:
                row = {**asdict(outcome.result), "capacity": cell.capacity, "seconds": round(outcome.seconds, 3)}
                rows.append(row | self.standing(cell))
        return rows

    def standing(self, cell: Cell) -> dict[str, Any]:
        """How a cell stands between LRU and the optimum, if that was asked for."""
        if not self.has_standings:
            return {}
        standing = standing_of(cell, self.outcomes)
        return asdict(standing) if standing else {field.name: None for field in fields(Standing)}

    def as_json(self) -> dict[str, Any]:
        """Results, failures, and where they come from."""
        failures = [
            {
                "trace": str(self.traces[outcome.cell.trace].name),
                **{name: value for name, value in asdict(outcome.cell).items() if name != "trace"},
                "error": outcome.error,
            }
            for outcome in self.failed
        ]
        num_left = sum(cell not in self.outcomes for cell in self.cells)
        return {"results": self.rows(), "failures": failures, "num_not_replayed": num_left, "facts": provenance()}

    def text_rows(self) -> tuple[list[str], list[list[str]]]:
        """The same for people: names of the columns, and the rows."""
        rows = self.rows()
        varied = [name for name in ("page_tokens", "block_tokens") if len({row[name] for row in rows}) > 1]
        names = ["trace", "capacity", "capacity_blocks", *varied, "policy", "token_hit_rate"]
        names += ["optimum_token_hit_rate", "gap_closed"] if self.has_standings else []
        names += ["waste", "evicted_blocks"]
        names += ["preemptions"] if any(row["preemptions"] for row in rows) else []
        header = [_TITLES.get(name, name.replace("_", " ")) for name in names]
        return header, [[_shown(name, row[name]) for name in names] for row in rows]

    def tables(self) -> list[Table]:
        """A table for each trace."""
        header, rows = self.text_rows()
        tables = []
        for title in dict.fromkeys(row[0] for row in rows):
            table = Table(title=title, title_justify="left")
            for name in header[1:]:
                table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
            for row in rows:
                if row[0] == title:
                    table.add_row(*row[1:])
            tables.append(table)
        return tables

    def save_plot(self, path: Path) -> None:
        """Draw it.

        Raises:
            ConfigError: the file can't be written.
        """
        header, rows = self.text_rows()
        facts = provenance()
        note = f"{facts['command']} (looseleaf {facts['versions']['looseleaf']}, {facts['commit'] or 'no checkout'})"
        plot = import_extra("looseleaf.lab.plot", "plot")
        try:
            plot.save_plot(path, list(self.outcomes.values()), header, rows, note)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


_TITLES = {
    "capacity_blocks": "blocks",
    "page_tokens": "page",
    "block_tokens": "block",
    "token_hit_rate": "hit rate",
    "optimum_token_hit_rate": "optimum",
    "evicted_blocks": "evicted",
}


def check_plot(path: Path) -> None:
    """Find out before hours of work whether a picture can be drawn there.

    Raises:
        ConfigError: no such format, no such folder, not writable, or matplotlib is missing.
    """
    suffixes = import_extra("looseleaf.lab.plot", "plot").SUFFIXES
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"--plot is {str(path)!r}; its name must end in {', '.join(suffixes)}")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    if is_new:
        path.unlink()


def print_table(table: Table) -> None:
    """On stdout, in its full width: a figure that is cut off is none."""
    console = stdout_console()
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, needed)
    console.print(table)


def result_table(row: Mapping[str, Any]) -> Table:
    """One result, a line for each figure."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in row.items():
        table.add_row(name.replace("_", " "), _shown(name, value))
    return table


def single_row(result: ReplayResult, standing: Mapping[str, Any]) -> dict[str, Any]:
    """One result for JSON."""
    return {**asdict(result), **standing}


def _shown(name: str, value: Any) -> str:
    if name in _SHARES:
        return "-" if value is None else f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else str(value)
