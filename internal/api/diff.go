package api

// Diff is the result of `kubevpn diff`: how the answers of a program of this machine differ from those of a workload.
type Diff struct {
	TypeMeta
	Namespace   string        `json:"namespace"`
	Workload    string        `json:"workload"`    // TYPE/NAME
	Requests    int           `json:"requests"`    // requests that both answered, or only the workload
	Differ      int           `json:"differ"`      // requests with a difference of Differences
	Differences []DiffGroup   `json:"differences"` // the most frequent first
	Ignored     []DiffIgnored `json:"ignored,omitempty"`
	NotCompared []DiffSkipped `json:"notCompared,omitempty"`
	// Incomplete is how many of Requests had a body longer than the limit, of which at most the beginning was compared.
	Incomplete int `json:"incomplete,omitempty"`
	// Dropped is how many requests were lost because there were too many at a time.
	Dropped uint64 `json:"dropped,omitempty"`
}

// DiffGroup is a difference of the answers to one route.
type DiffGroup struct {
	Route string `json:"route"` // "GET /orders/{id}"
	// Where is the place in the answer: "status", "header NAME", "trailer NAME", "body $.items[*].id", "body line 3",
	// "body lines", "body bytes" or "answer".
	Where    string        `json:"where"`
	Requests int           `json:"requests"`
	Examples []DiffExample `json:"examples"` // the first ones
}

// DiffExample is a difference as one request showed it.
type DiffExample struct {
	Path string `json:"path"` // of the request, with its query
	From string `json:"from"` // the workload's
	To   string `json:"to"`   // the local program's
}

// DiffIgnored is a place that is ignored, because it differs between two answers of the same version.
type DiffIgnored struct {
	Route  string `json:"route"`
	Where  string `json:"where"`
	Reason string `json:"reason"`
	Times  int    `json:"times"` // how often it was seen to differ
}

// DiffSkipped is a number of recorded requests that were not compared.
type DiffSkipped struct {
	Reason   string `json:"reason"`
	Requests int    `json:"requests"`
}
