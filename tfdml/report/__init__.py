"""Reports that a person looks at: what a run achieved, an audit, and the map for a notebook."""

from tfdml.report.figures import map as map
from tfdml.report.pages import write_audit as write_audit
from tfdml.report.pages import write_report as write_report
from tfdml.report.pages import write_run_report as write_run_report
from tfdml.report.runs import Run as Run
from tfdml.report.runs import read_run as read_run
