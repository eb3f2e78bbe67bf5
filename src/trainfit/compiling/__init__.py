"""Plans that torch.compile carries out."""
