"""What Pollux is measured against, written anew from published formulas."""
