"""What `gramian certify` found, as tables: quantities and then parameters, worst first."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from launch.reports import align_right
from trainer.certify.findings import Finding

_SHOWN = 15  # parameters; --json has all


def print_tables(console: Console, rows: list[Finding]) -> None:
    """Print the worst of every quantity, and then the parameters.

    Args:
        rows: all findings, worst first.
    """
    worst: dict[str, Finding] = {}
    for row in rows:
        worst.setdefault(row.quantity, row)
    quantities = Table("quantity", "worst in", "difference", "at step", "allowed", "")
    for row in worst.values():
        verdict = "" if row.passed else "FAILED"
        cells = row.parameter, f"{row.difference:.1e}", str(row.step), f"{row.allowed:.0e}" if row.allowed else "0"
        quantities.add_row(row.quantity, *cells, verdict)
    _fold(quantities)
    align_right(quantities, 2, 3, 4)
    console.print(quantities)

    columns = ("initial weight", "gradient", "update")
    parameters: dict[str, dict[str, Finding]] = {}
    for row in rows:
        if row.parameter:
            parameters.setdefault(row.parameter, {})[row.quantity] = row
    table = Table("parameter, worst first", *columns)
    for name, found in list(parameters.items())[:_SHOWN]:
        table.add_row(name, *(_cell(found.get(column)) for column in columns))
    if len(parameters) > _SHOWN:
        table.add_row(f"and {len(parameters) - _SHOWN} more, none of them worse")
    _fold(table)
    align_right(table, 1, 2, 3)
    console.print(table)


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return "-"
    return f"{finding.difference:.1e}{'' if finding.passed else ' FAILED'}"


def _fold(table: Table) -> None:
    """Show long names whole, over several lines."""
    for column in table.columns:
        column.overflow = "fold"
