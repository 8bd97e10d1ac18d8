"""`looseleaf demo`: the same small workload served twice, without and with reuse and pins, and what that changed."""
