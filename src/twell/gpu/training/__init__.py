"""Forward that keeps what a backward needs, and the backward."""
