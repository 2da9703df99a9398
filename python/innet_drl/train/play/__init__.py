"""Playing: the actor, the trained agent, and its evaluations and videos."""
