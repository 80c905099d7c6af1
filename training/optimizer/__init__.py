"""What a step does with its gradients: the learning rate, the optimizer, and how its state is stored."""
