"""What the runners run: one module per benchmark, all behind `Suite`."""
