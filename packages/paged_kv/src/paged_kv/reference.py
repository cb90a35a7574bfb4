"""Plain torch attention over pages: any dtype, any device; the oracle of the other backends."""
