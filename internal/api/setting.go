package api

// Origin names the layer that a setting comes from. An earlier one takes precedence over a later one.
type Origin string

const (
	OriginFlag        Origin = "flag"
	OriginEnvironment Origin = "environment"
	OriginFile        Origin = "file"    // of the user
	OriginCluster     Origin = "cluster" // the client defaults of the traffic manager
	OriginDefault     Origin = "default" // built in
)

// Setting is the value of one setting, and where it comes from.
type Setting struct {
	Key    string `json:"key"`   // in the user's file
	Value  string `json:"value"` // of a list: separated by commas
	Origin Origin `json:"origin"`
	// "--netstack", "KUBEVPN_NETSTACK", the path of the file, "ConfigMap NAMESPACE/NAME"; empty: built in
	Source string `json:"source,omitempty"`
}

// SettingList is the output of `kubevpn config view`.
type SettingList struct {
	TypeMeta
	Items []Setting `json:"items"`
}
