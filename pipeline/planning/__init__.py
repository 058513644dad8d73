"""How many devices a night takes: device profiles, a workload, and two computations of the same queues."""
