"""Reports that a person looks at: what one run achieved, several runs side by side, and figures for a notebook."""

from tfdml.report.embedding_map import map as map
from tfdml.report.pages import write_audit as write_audit
from tfdml.report.pages import write_comparison as write_comparison
from tfdml.report.pages import write_report as write_report
from tfdml.report.pages import write_run_report as write_run_report
from tfdml.report.runs import Run as Run
from tfdml.report.runs import read_run as read_run
