"""The files of a run, by name; free of imports. Others have theirs beside what writes them (`own_files` has all)."""

CONFIG, RECORD, METRICS, RESULT = "config.yaml", "record.json", "metrics.jsonl", "result.json"
TRACE, SIMULATED, TIMELINE = "trace.json.gz", "simulated.json.gz", "timeline.png"
