"""What a run is: its settings, the loop over tasks and rounds, its state and checkpoints, the launch."""
