"""Plain data that everything shares: plans, profiles, clusters, traces, records, problems, files. Free of torch."""
