"""Marks in eclip's files that are no artefacts, so that only such files are overwritten."""

REPORT_MARK = b"eclip report"
TRACE_MARK = b"traceEvents"
