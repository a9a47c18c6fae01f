"""What is made for GPUs: channels-last convolutions as matrix products, and dlight's rules with what they lack."""
