package hostservice

// Paths of the service. They are constants: nothing that a user sets may choose what root executes or trusts.
const (
	// Program is the copy of kubevpn that root executes.
	Program = programDir + "/kubevpn"
	// PolicyFile says what users of the service may route and resolve.
	PolicyFile = policyDir + "/helper.yaml"

	policyDir = "/etc/kubevpn"
)
