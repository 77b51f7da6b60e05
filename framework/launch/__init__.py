"""Who starts, hosts, watches and ends the processes of a run. What they run is handed over by name."""
