"""The lag job: snapshots of offsets → lag, trend and status. docs/lag.md explains the columns."""
