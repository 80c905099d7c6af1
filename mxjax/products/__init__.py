"""Matrix products whose GEMMs run in a policy's precision, and the choice of what computes them."""
