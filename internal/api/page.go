package api

// PageRequest asks the daemon to serve the page of `kubevpn ui`. A second request gets the same page, whose checks then
// look at the cluster of that request.
type PageRequest struct {
	Stop bool `json:"stop,omitempty"` // end the page instead
	// Connect names the cluster that the checks look at, as far as `kubevpn doctor` needs it.
	Connect ConnectRequest `json:"connect"`
	// Cluster is the kubeconfig's name for the cluster.
	Cluster string `json:"cluster,omitempty"`
	// KubeconfigError says why Connect has no kubeconfig.
	KubeconfigError *Error `json:"kubeconfigError,omitempty"`
	// Machine is the kind of this machine, as in Status.
	Machine string   `json:"machine,omitempty"`
	Redact  []string `json:"redact,omitempty"` // names of headers whose values the page does not show
}

// Page is the output of `kubevpn ui`: the page of the daemon.
type Page struct {
	TypeMeta
	URL  string `json:"url"`  // with the token; empty: the daemon serves no page
	File string `json:"file"` // that leads a browser to URL; only the user can read it
}

// PageUpdate is a JSON line that the page reads each second.
type PageUpdate struct {
	Status Status     `json:"status"`
	Flows  FlowList   `json:"flows"`
	DNS    []DNSQuery `json:"dns"` // since the line before
	Log    []string   `json:"log"` // lines of the daemon's log since the line before
}
