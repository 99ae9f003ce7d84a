"""What files of ours that are no artefacts carry, so that only they are replaced by their like."""

REPORT_MARK = b"eclip report"
TRACE_MARK = b"traceEvents"
