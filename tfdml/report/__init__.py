"""Pages that a person looks at: what one run achieved, and several runs side by side."""

from tfdml.report.comparison import write_comparison
from tfdml.report.run_report import write_report
from tfdml.report.runs import Run, read_run
from tfdml.report.seeds_report import write_seeds_report
from tfdml.report.thumbnails import dataset_reader

__all__ = ["Run", "dataset_reader", "read_run", "write_comparison", "write_report", "write_seeds_report"]
