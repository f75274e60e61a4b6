"""What people see of a run: the page, the comparison, the sinks. Reads records and nothing else."""

from trimtab.report.html import write_report

__all__ = ["write_report"]
