"""What chains are made of: priors of weights and hyperparameters, a sweep, how many chains and how they are pooled."""
