"""What every package needs and none owns. Nothing here imports torch."""
