"""What the ranks do and how they fail: rank status, the node monitor, slow ranks, failure reports.

Start with `rank_status`, which each rank writes, then `node_monitor`, which reads it, and `report`.
"""
