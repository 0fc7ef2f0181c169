"""Inside the job: a PyTorch loop measures itself and tunes its batch size and learning rate. The one room of torch."""
