"""What a move is: layouts, planner, routes, schedule, execution and digest."""
