"""What a run leaves behind: metrics, the run folder, tables and the HTML reports."""

from __future__ import annotations

from fot.results.comparison import write_comparison
from fot.results.folder import FORMAT, SUMMARY_KEYS, RunFolder, check_summary
from fot.results.report import write_report

__all__ = ["FORMAT", "SUMMARY_KEYS", "RunFolder", "check_summary", "write_comparison", "write_report"]
