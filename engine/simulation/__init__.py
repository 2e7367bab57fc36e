"""The scheduler on a virtual clock: workloads, machines from datasheets, metrics; no GPU, no model."""
