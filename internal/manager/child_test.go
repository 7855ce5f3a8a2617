package manager

func childMain() bool { return false }
