"""Reports that a person looks at: what one run achieved, and several runs side by side."""

from tfdml.report.comparison import write_comparison
from tfdml.report.run_report import write_report, write_run_report
from tfdml.report.runs import Run, read_run

__all__ = ["Run", "read_run", "write_comparison", "write_report", "write_run_report"]
