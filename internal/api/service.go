package api

// HelperService is the output of `kubevpn service status`. If the service is not installed, the other fields are empty.
type HelperService struct {
	TypeMeta
	Installed bool   `json:"installed"`
	Active    bool   `json:"active"`            // systemd accepts connections
	Allowed   bool   `json:"allowed"`           // this user may connect
	Version   string `json:"version,omitempty"` // of the program that it runs
	User      string `json:"user,omitempty"`    // who may connect
	Group     string `json:"group,omitempty"`   // whose members may connect
	Socket    string `json:"socket,omitempty"`
	Program   string `json:"program,omitempty"`
	Policy    string `json:"policy,omitempty"` // the file that says what its users may route and resolve
}
