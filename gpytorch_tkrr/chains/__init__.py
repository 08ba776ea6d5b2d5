"""The chains of a Gibbs fit: what they have in common, the two kinds, and what short ones decide before."""
