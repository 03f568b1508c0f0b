"""The watchdog: processes that outlive the ranks and record how their run failed."""
