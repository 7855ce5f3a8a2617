package term

func closeOnExec(int) {} // no process inherits it
