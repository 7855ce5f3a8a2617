package osdns

func holderRole() int { return 0 }
