"""The update from gradients: learning rate, optimizer, and how its state is stored."""
