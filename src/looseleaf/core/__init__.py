"""Pages, block tables, prefix tree, leases, pins, eviction, accounting, explanations. Needs numpy only."""
