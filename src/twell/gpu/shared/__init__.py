"""What all kernels share: launches, tiles, rows."""
