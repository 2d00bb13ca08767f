"""`rowcast simulate`: the traffic of other policies, capacities and horizons."""
