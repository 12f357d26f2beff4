// The Python face of the CPU engine. Arguments are checked in backend.py; every call that computes lets go of the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "draft.h"
#include "packing.h"
#include "pass.h"

namespace nb = nanobind;
using namespace warpsmith;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
template <class T>
using Maybe = std::optional<Array<T>>;

template <class T>
T* pointer(const Maybe<T>& array) {
    return array ? array->data() : nullptr;
}

// A model and the buffers its passes share.
struct Engine {
    Engine(const Config& config, int threads, const std::vector<std::string>& features)
        : model(config, threads, features) {}
    void finish() {
        model.finish();
        work.emplace(model);
    }
    Model model;
    std::optional<Workspace> work;
};

Config config_from(nb::handle o) {
    const auto number = [&](const char* name) { return nb::cast<int>(o.attr(name)); };
    Config c{};
    c.layers = number("layers"), c.hidden = number("hidden"), c.ffn = number("ffn"), c.vocab = number("vocab");
    c.heads = number("heads"), c.kv_heads = number("kv_heads"), c.key_heads = number("key_heads");
    c.value_heads = number("value_heads"), c.head_dim = number("head_dim"), c.rotary_dim = number("rotary_dim");
    c.key_head_dim = number("key_head_dim"), c.value_head_dim = number("value_head_dim");
    c.conv_kernel = number("conv_kernel"), c.mtp_layers = number("mtp_layers");
    c.tied = nb::cast<bool>(o.attr("tied"));
    c.eps = nb::cast<float>(o.attr("eps"));
    c.rope_theta = nb::cast<double>(o.attr("rope_theta"));
    for (nb::handle flag : o.attr("recurrent")) c.recurrent.push_back(nb::cast<bool>(flag));
    return c;
}

Type type_of(const std::string& name) {
    for (int i = 0; i < kTypes; i++) {
        if (name == kTypeNames[i]) return static_cast<Type>(i);
    }
    throw nb::value_error(("no kernels for " + name).c_str());
}

DraftConfig draft_config_from(nb::handle o, const std::vector<int>& capacity, int vocab) {
    const auto number = [&](const char* name) { return nb::cast<int>(o.attr(name)); };
    DraftConfig c{};
    c.layers = number("layers"), c.hidden = number("hidden"), c.ffn = number("ffn"), c.heads = number("heads");
    c.kv_heads = number("kv_heads"), c.head_dim = number("head_dim"), c.block = number("block");
    c.mask_token = number("mask_token"), c.features = static_cast<int>(nb::cast<std::vector<int>>(o.attr("target_layers")).size());
    c.eps = nb::cast<float>(o.attr("eps"));
    c.rope_theta = nb::cast<double>(o.attr("rope_theta"));
    c.speaks = o.attr("speaks").is_none() ? vocab : number("speaks");
    c.own_head = nb::cast<bool>(o.attr("own_head"));
    for (nb::handle window : o.attr("windows")) c.windows.push_back(window.is_none() ? 0 : nb::cast<int>(window));
    for (nb::handle flag : o.attr("causal")) c.causal.push_back(nb::cast<bool>(flag));
    c.capacity = capacity;
    return c;
}

void check_stored(const std::string& name, Type type, int rows, int cols, size_t bytes) {
    const Layout& layout = layout_of(type);
    if (rows < 1 || cols % layout.elems || bytes != static_cast<size_t>(rows) * (cols / layout.elems) * layout.stored_bytes) {
        throw nb::value_error((name + " does not have the size of its shape").c_str());
    }
}

Kv kv_of(const std::string& name) {
    if (name == "f16") return Kv::F16;
    if (name == "f32") return Kv::F32;
    if (name == "q8_0") return Kv::Q8_0;
    throw nb::value_error(("no keys and values in " + name).c_str());
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.doc() = "Kernels of the CPU backend.";
    m.attr("STAGES") = kStages;
    m.def("features", &cpu_features, "Instruction sets of this processor that matter to the kernels.");
    m.def("packed_bytes", [](const std::string& type, int rows, int cols) {
        return Weights::packed_bytes(type_of(type), rows, cols);
    });

    nb::class_<Want>(m, "Want")
        .def("__init__",
             [](Want* self, int tokens, int top, std::vector<int> rows, std::vector<int> layers, Maybe<int32_t> argmax,
                Maybe<int32_t> top_ids, Maybe<float> top_logits, Maybe<float> logsumexp, Maybe<float> logits,
                Maybe<float> features, Maybe<float> hidden) {
                 new (self) Want{static_cast<Tokens>(tokens), top, std::move(rows), std::move(layers), pointer(argmax),
                                 pointer(top_ids), pointer(top_logits), pointer(logsumexp), pointer(logits),
                                 pointer(features), pointer(hidden)};
             },
             nb::kw_only(), nb::arg("tokens"), nb::arg("top"), nb::arg("rows"), nb::arg("layers"),
             nb::arg("argmax") = nb::none(), nb::arg("top_ids") = nb::none(), nb::arg("top_logits") = nb::none(),
             nb::arg("logsumexp") = nb::none(), nb::arg("logits") = nb::none(), nb::arg("features") = nb::none(),
             nb::arg("hidden") = nb::none());

    nb::class_<Engine>(m, "Engine")
        .def("__init__",
             [](Engine* self, nb::handle config, int threads, const std::vector<std::string>& features) {
                 new (self) Engine(config_from(config), threads, features);
             })
        .def_prop_ro("kernels", [](const Engine& self) { return std::string(self.model.kernels.name); })
        .def_prop_ro("threads", [](const Engine& self) { return self.model.pool.threads(); })
        .def("reserve", [](Engine& self, size_t bytes) { self.model.weights.reserve(bytes); })
        .def("add_matrix",
             [](Engine& self, const std::string& name, const std::string& type, int rows, int cols, Array<const uint8_t> stored) {
                 const Type t = type_of(type);
                 check_stored(name, t, rows, cols, stored.size());
                 const uint8_t* data = stored.data();
                 nb::gil_scoped_release release;
                 self.model.weights.add_matrix(self.model.pool, name, t, rows, cols, data);
             })
        .def("add_vector", [](Engine& self, const std::string& name, Array<const float> values) {
            self.model.weights.add_vector(name, values.data(), values.size());
        })
        .def("finish", &Engine::finish)
        .def("unpack_row",
             [](const Engine& self, int row, Array<float> out) { unpack_row(self.model.embedding, row, out.data()); })
        .def("multiply",
             [](Engine& self, const std::string& name, Array<const float> x, Array<float> out) {
                 // one matrix times up to 64 columns, as a pass does it: for tests and measurements of a kernel
                 const int n = static_cast<int>(x.shape(0));
                 const float* columns = x.data();
                 float* to = out.data();
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.model.busy);
                 multiply(self.model, *self.work, name, columns, n, to);
             })
        .def("chains",
             [](Engine& self, const std::vector<State*>& states, const std::vector<int>& lengths,
                Array<const int32_t> tokens, const Want& want) {
                 // a chain a state, one after another in `tokens`; each becomes part of its state
                 const int32_t* ids = tokens.data();
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.model.busy);
                 std::vector<Part> parts;
                 for (size_t i = 0; i < states.size(); i++) {
                     State& state = *states[i];
                     state.tree = Tree::chain(lengths[i]);
                     parts.push_back({state, state.tree, state.length});
                 }
                 Pass(self.model, *self.work, std::move(parts), true).forward(ids, want);
                 for (size_t i = 0; i < states.size(); i++) {
                     states[i]->length += lengths[i];
                     states[i]->tree.n = 0;
                 }
             })
        .def("decode",
             [](Engine& self, const std::vector<State*>& states, Array<int32_t> tokens,
                const std::vector<int32_t>& stop) {
                 // [1 + rows][states]: the first row is given, each other is what follows the one before it. None comes
                 // after a row with a token in `stop`, or with kNotFinite; returns how many came
                 const size_t n = states.size();
                 int32_t* row = tokens.data();
                 const int rows = static_cast<int>(tokens.shape(0)) - 1;
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.model.busy);
                 Want want;
                 for (size_t i = 0; i < n; i++) {
                     want.rows.push_back(static_cast<int>(i));
                     states[i]->tree = Tree::chain(1);
                 }
                 int came = 0;
                 const auto last = [&](int32_t token) {
                     return token == kNotFinite || std::find(stop.begin(), stop.end(), token) != stop.end();
                 };
                 for (bool ended = false; came < rows && !ended; came++, row += n) {
                     std::vector<Part> parts;
                     for (State* state : states) parts.push_back({*state, state->tree, state->length});
                     want.argmax = row + n;
                     Pass(self.model, *self.work, std::move(parts), true).forward(row, want);
                     for (State* state : states) state->length++;
                     ended = std::any_of(want.argmax, want.argmax + n, last);
                 }
                 for (State* state : states) state->tree.n = 0;
                 return came;
             })
        .def("trees",
             [](Engine& self, const std::vector<State*>& states, const std::vector<int>& nodes,
                Array<const int32_t> tokens, Array<const int32_t> parents, const Want& want) {
                 // a tree a state, one after another in `tokens` and `parents`
                 const int32_t *ids = tokens.data(), *above = parents.data();
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.model.busy);
                 std::vector<Part> parts;
                 for (size_t i = 0; i < states.size(); above += nodes[i++]) {
                     State& state = *states[i];
                     state.tree = Tree::of(above, nodes[i]);
                     parts.push_back({state, state.tree, state.length});
                 }
                 Pass(self.model, *self.work, std::move(parts), false).forward(ids, want);
             })
        .def("commit",
             [](Engine& self, State& state, Array<const int32_t> path) {
                 const int n = static_cast<int>(path.size());
                 const int32_t* nodes = path.data();
                 std::optional<nb::gil_scoped_release> release;
                 if (n > 1) release.emplace();  // the root alone takes microseconds, less than to get the lock back
                 const std::lock_guard<std::mutex> lock(self.model.busy);
                 Pass::commit(self.model, *self.work, state, nodes, n);
             })
        .def("save",
             [](Engine& self, State& state, Array<uint8_t> to) {
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.model.busy);
                 state.save(self.model.pool, to.data());
             })
        .def("mtp",
             [](Engine& self, State& state, Array<const int32_t> tokens, Array<const float> hidden, int position, const Want& want) {
                 const int n = static_cast<int>(tokens.size());
                 const int32_t* ids = tokens.data();
                 const float* rows = hidden.data();
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.model.busy);
                 const Tree tree = Tree::chain(n);
                 Pass(self.model, *self.work, {{state, tree, position}}, true).mtp(ids, rows, want);
             });

    nb::class_<Draft>(m, "Draft")
        .def("__init__",
             [](Draft* self, Engine& engine, nb::handle config, const std::vector<int>& capacity) {
                 new (self) Draft(engine.model, draft_config_from(config, capacity, engine.model.config.vocab));
             }, nb::keep_alive<1, 2>())
        .def("reserve", [](Draft& self, size_t bytes) { self.weights.reserve(bytes); })
        .def("add_matrix",
             [](Draft& self, const std::string& name, const std::string& type, int rows, int cols, Array<const uint8_t> stored) {
                 const Type t = type_of(type);
                 check_stored(name, t, rows, cols, stored.size());
                 const uint8_t* data = stored.data();
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.target().busy);
                 self.weights.add_matrix(self.target().pool, name, t, rows, cols, data);
             })
        .def("add_vector", [](Draft& self, const std::string& name, Array<const float> values) {
            self.weights.add_vector(name, values.data(), values.size());
        })
        .def("finish", &Draft::finish)
        .def("append",
             [](Draft& self, DraftMemory& memory, Array<const float> features, int position) {
                 const int n = static_cast<int>(features.shape(0));
                 const float* rows = features.data();
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.target().busy);
                 self.append(memory, rows, n, position);
             })
        .def("propose",
             [](Draft& self, DraftMemory& memory, Maybe<const float> features, int at, int root, int position, int rows,
                const Want& want) {
                 const int n = features ? static_cast<int>(features->shape(0)) : 0;
                 const float* committed = pointer(features);
                 nb::gil_scoped_release release;
                 const std::lock_guard<std::mutex> lock(self.target().busy);
                 self.propose(memory, committed, n, at, root, position, rows, want);
             }, nb::arg("memory"), nb::arg("features").none(), nb::arg("at"), nb::arg("root"), nb::arg("position"),
             nb::arg("rows"), nb::arg("want"));

    nb::class_<DraftMemory>(m, "DraftMemory")
        .def("__init__", [](DraftMemory* self, const Draft& draft) { new (self) DraftMemory(draft.config()); })
        .def("forget", &DraftMemory::forget)
        .def("snapshot_bytes", &DraftMemory::snapshot_bytes)
        .def("save", [](const DraftMemory& self, Array<uint8_t> to) { self.save(to.data()); })
        .def("load", [](DraftMemory& self, Array<const uint8_t> from) { self.load(from.data()); });

    nb::class_<State>(m, "State")
        .def("__init__",
             [](State* self, const Engine& engine, int context, const std::string& keys, const std::string& values) {
                 new (self) State(engine.model, context, kv_of(keys), kv_of(values));
             }, nb::keep_alive<1, 2>())
        .def_ro("length", &State::length)
        .def_ro("context", &State::context)
        .def("snapshot_bytes", &State::snapshot_bytes)
        .def("load", [](State& self, Array<const uint8_t> from, int length) {
            nb::gil_scoped_release release;
            self.load(from.data(), length);
        });
}
