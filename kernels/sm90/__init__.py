"""Device code in CuTe DSL, imported when it is compiled: cutlass may not be installed."""
