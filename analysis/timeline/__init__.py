"""`rowcast timeline`: the recordings of both processes (`--timeline`) on one clock."""
