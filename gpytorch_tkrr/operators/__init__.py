"""Low-rank covariance matrices as linear operators: Gram matrices, likelihoods, several tasks."""
