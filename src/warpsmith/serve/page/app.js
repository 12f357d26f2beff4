// The page: conversations, the message box, one answer at a time.

import { ApiError, chat, props } from "./api.js";
import { icon, renderInto } from "./markdown.js";
import { store } from "./store.js";

const $ = (id) => document.getElementById(id);
const IDEAS = ["Write a Python function that merges two sorted lists", "Explain what a generator is", "Write a class for a stack"];
const SHOWN_STEPS = 160;
let answering = null; // {conversation, message, abort, node, steps, tokens, began}

// What is seen

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  node.className = className;
  node.append(...children);
  return node;
}

function button(name, label, act, text) {
  const node = make("button", "", icon(name), ...(text ? [text] : []));
  node.type = "button";
  node.title = label;
  node.setAttribute("aria-label", label);
  node.addEventListener("click", act);
  return node;
}

function showList() {
  $("list").replaceChildren(...store.conversations.map((conversation) => {
    const pick = make("button", "pick", conversation.title);
    pick.type = "button";
    pick.addEventListener("click", () => open(conversation.id));
    const drop = button("bin", `Delete "${conversation.title}"`, () => remove(conversation.id));
    drop.className = "drop";
    const line = make("li", conversation.id === store.current ? "current" : "", pick, drop);
    if (conversation.id === store.current) pick.setAttribute("aria-current", "true");
    return line;
  }));
  $("title").textContent = store.conversation?.title ?? "New conversation";
}

function showLog() {
  const messages = store.conversation?.messages ?? [];
  $("log").replaceChildren(...messages.map((message, index) => messageNode(message, index)));
  $("hello").hidden = messages.length > 0;
  $("log").hidden = !messages.length;
  if (answering?.conversation === store.conversation) answering.node = $("log").lastElementChild;
  showMeter();
  stick(true);
}

function messageNode(message, index) {
  const node = make("article", `message ${message.role}`);
  node.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  if (message.role === "user") {
    const text = make("div", "text", message.content);
    const acts = make("div", "acts", copyButton(() => message.content), button("edit", "Edit", () => edit(node, message, index)));
    node.append(text, acts);
  } else {
    node.append(make("div", "body"));
    fillAnswer(node, message, index);
  }
  return node;
}

// Also called again and again while the answer grows.
function fillAnswer(node, message, index) {
  const body = node.querySelector(".body"), live = answering?.message === message;
  let thoughts = body.querySelector(".thoughts"), text = body.querySelector(".answer");
  if (message.reasoning && !thoughts) {
    thoughts = make("details", "thoughts", make("summary", "", "Thoughts"), make("div", "md"));
    body.prepend(thoughts);
  }
  if (thoughts) {
    thoughts.classList.toggle("working", live && !message.content);
    renderInto(thoughts.querySelector(".md"), message.reasoning);
  }
  if (!text) body.append(text = make("div", "md answer"));
  renderInto(text, message.content);
  body.querySelector(".waiting")?.remove();
  if (live && !message.content && !message.reasoning) {
    body.append(make("div", "waiting", make("i", ""), make("i", ""), make("i", "")));
  }
  if (live) return;
  node.querySelector(".acts")?.remove();
  body.querySelector(".failure")?.remove();
  if (message.error) {
    const box = make("div", "failure", message.error);
    box.setAttribute("role", "alert");
    body.append(box);
  }
  const acts = make("div", "acts", copyButton(() => message.content));
  if (index === store.conversation.messages.length - 1) acts.append(button("again", "Regenerate", regenerate));
  if (message.note) acts.append(make("span", "note", message.note));
  node.append(acts);
}

function copyButton(text) {
  return button("copy", "Copy", () => copy(text()));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser does not allow copying here.");
  }
}

function showMeter() {
  const steps = answering ? answering.steps : store.conversation?.messages.at(-1)?.steps ?? [];
  $("meter").hidden = !steps.length;
  $("bars").replaceChildren(...steps.slice(-SHOWN_STEPS).map(bar));
  if (!answering) $("speed").textContent = store.conversation?.messages.at(-1)?.speed ?? "";
}

// A step: how many tokens were drafted, and how many it decided.
function bar([drafted, decided]) {
  const outer = make("span", ""), inner = make("i", "");
  const height = (tokens) => `${Math.min(26, 3 + 2.6 * tokens)}px`;
  outer.style.height = height(Math.max(drafted + 1, decided));
  inner.style.height = height(decided);
  outer.append(inner);
  outer.title = `${drafted} drafted, ${decided} decided`;
  return outer;
}

const say = (text) => { $("status").textContent = text; };

// Stay at the end, unless the reader has gone up to read.
let near = true;
$("scroll").addEventListener("scroll", () => {
  const box = $("scroll");
  near = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
});
function stick(always) {
  if (always || near) $("scroll").scrollTop = $("scroll").scrollHeight;
}

// What is done

function open(id) {
  store.current = id;
  store.save();
  closeSide();
  showList();
  showLog();
  $("input").focus();
}

function remove(id) {
  if (answering?.conversation.id === id) answering.abort.abort();
  store.remove(id);
  store.save();
  showList();
  showLog();
}

function send(text) {
  const conversation = store.conversation ?? store.begin();
  if (!conversation.messages.length) conversation.title = text.split("\n")[0].slice(0, 60);
  conversation.messages.push({ role: "user", content: text });
  answer(conversation);
}

function regenerate() {
  const conversation = store.conversation;
  if (answering || !conversation) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  answer(conversation);
}

function edit(node, message, index) {
  if (answering) return;
  const box = make("textarea", ""), label = "Edit the message";
  box.value = message.content;
  box.setAttribute("aria-label", label);
  const done = make("button", "primary", "Send"), cancel = make("button", "quiet", "Cancel");
  done.type = cancel.type = "button";
  cancel.addEventListener("click", showLog);
  done.addEventListener("click", () => {
    const text = box.value.trim();
    if (!text) return;
    store.conversation.messages.length = index;
    send(text);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); showLog(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done.click(); }
  });
  node.replaceChildren(make("div", "editing", box, make("div", "row", cancel, done)));
  box.focus();
}

function request(conversation) {
  const { system, thinking, ...sampling } = store.settings;
  const messages = conversation.messages.map(({ role, content }) => ({ role, content }));
  const body = { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  for (const [name, value] of Object.entries(sampling)) if (value !== "" && value !== undefined) body[name] = Number(value);
  if (thinking) body.enable_thinking = thinking === "on";
  return body;
}

async function answer(conversation) {
  const body = request(conversation);
  const message = { role: "assistant", content: "", reasoning: "", steps: [] };
  conversation.messages.push(message);
  answering = { conversation, message, abort: new AbortController(), node: null, steps: message.steps, tokens: 0, began: 0 };
  const mine = answering;
  store.save();
  showList();
  showLog();
  working(true);
  let drawing = 0;
  const draw = () => {
    drawing = 0;
    if (store.conversation !== conversation || answering !== mine) return;
    fillAnswer(mine.node, message, conversation.messages.length - 1);
    $("meter").hidden = !mine.steps.length;
    const bars = $("bars");
    bars.append(...mine.steps.slice(mine.drawn ?? 0).map(bar));
    mine.drawn = mine.steps.length;
    while (bars.children.length > SHOWN_STEPS) bars.firstElementChild.remove();
    const seconds = (performance.now() - mine.began) / 1000;
    if (mine.tokens > 1 && seconds > 0.2) $("speed").textContent = `${((mine.tokens - 1) / seconds).toFixed(1)} tok/s`;
    stick(false);
  };
  try {
    await chat(body, store.key, mine.abort.signal, (chunk) => {
      const choice = chunk.choices[0];
      message.content += choice?.delta.content ?? "";
      message.reasoning += choice?.delta.reasoning_content ?? "";
      for (const step of chunk.steps ?? []) {
        mine.began ||= performance.now();
        mine.tokens += step.decided;
        mine.steps.push([step.drafted, step.decided]);
      }
      if (choice?.finish_reason) finish(message, choice.finish_reason, chunk.timings);
      drawing ||= requestAnimationFrame(draw);
    });
    say("The answer is complete.");
  } catch (error) {
    if (mine.abort.signal.aborted) {
      message.note = "stopped";
      say("Stopped.");
    } else {
      message.error = error instanceof ApiError ? error.message : "The server cannot be reached. Is it running?";
      if (error.status === 401) openSettings("key");
    }
  } finally {
    cancelAnimationFrame(drawing);
    message.steps = message.steps.slice(-SHOWN_STEPS);
    answering = null;
    store.save();
    working(false);
    if (store.conversation === conversation) {
      fillAnswer($("log").lastElementChild, message, conversation.messages.length - 1);
      showMeter();
      stick(false);
    }
  }
}

function finish(message, reason, timings) {
  const speed = timings.predicted_per_second;
  const length = timings.draft_n ? `, ${timings.acceptance_length.toFixed(2)} tokens a step` : "";
  message.speed = speed ? `${speed.toFixed(1)} tok/s${length}` : "";
  message.note = `${timings.predicted_n} tokens` + (speed ? `, ${speed.toFixed(1)} tok/s` : "") + (reason === "length" ? ", cut at the limit" : "");
}

function working(on) {
  const control = $("send");
  control.replaceChildren(icon(on ? "stop" : "send"));
  control.setAttribute("aria-label", on ? "Stop" : "Send");
  control.disabled = !on && !$("input").value.trim();
  $("log").setAttribute("aria-busy", String(on));
}

// What is listened to

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) { answering.abort.abort(); return; }
  const text = $("input").value.trim();
  if (!text) return;
  $("input").value = "";
  grow();
  send(text);
});

function grow() {
  const box = $("input");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
  if (!answering) $("send").disabled = !box.value.trim();
}
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!answering) $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && answering && !$("settings").open) answering.abort.abort();
  if (event.key === "Escape") closeSide();
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
  if (event.key === "/" && !typing) { event.preventDefault(); $("input").focus(); }
});
document.addEventListener("click", (event) => {
  const control = event.target.closest?.("[data-copy=code]");
  if (control) copy(control.closest("figure").querySelector("code").textContent);
});

$("new").addEventListener("click", () => {
  const empty = store.conversations.find((each) => !each.messages.length);
  open((empty ?? store.begin()).id);
});

function closeSide() {
  $("side").classList.remove("open");
  $("veil").hidden = true;
  $("menu").setAttribute("aria-expanded", "false");
}
$("menu").addEventListener("click", () => {
  $("side").classList.add("open");
  $("veil").hidden = false;
  $("menu").setAttribute("aria-expanded", "true");
  $("new").focus();
});
$("veil").addEventListener("click", closeSide);

function showTheme() {
  document.documentElement.dataset.theme = store.theme;
  $("theme").setAttribute("aria-label", `Theme: ${store.theme}`);
  $("theme").title = `Theme: ${store.theme}`;
}
$("theme").addEventListener("click", () => {
  const themes = ["auto", "light", "dark"];
  store.theme = themes[(themes.indexOf(store.theme) + 1) % themes.length];
  store.save();
  showTheme();
});

const form = $("settings").querySelector("form");
function openSettings(focus) {
  for (const field of form.elements) {
    if (field.name) field.value = field.name === "key" ? store.key : store.settings[field.name] ?? "";
  }
  if (!$("settings").open) $("settings").showModal();
  if (focus) form.elements[focus].focus();
}
$("open-settings").addEventListener("click", () => openSettings());
$("settings").addEventListener("close", () => {
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.name === "key") store.key = field.value.trim();
    else store.settings[field.name] = field.validity.valid ? field.value : "";
  }
  store.save();
  showFacts();
  // Chromium gives the focus back to the message box without its caret, and keys are lost; asking again brings both
  $("input").blur();
  $("input").focus();
});
$("forget").addEventListener("click", () => {
  if (!confirm("Delete every conversation in this browser?")) return;
  answering?.abort.abort();
  store.conversations = [];
  store.current = null;
  store.save();
  showList();
  showLog();
});

async function showFacts() {
  try {
    const facts = await props(store.key);
    const context = facts.default_generation_settings.n_ctx.toLocaleString();
    $("facts").textContent = `${facts.model_alias} on ${facts.device}, context ${context}` + (facts.draft ? `, draft ${facts.draft}` : "");
    $("hello-facts").textContent = `${facts.model_alias} runs on this server's ${facts.device}. Conversations stay in this browser.`;
    document.title = `${facts.model_alias} · warpsmith`;
  } catch (error) {
    $("facts").textContent = error instanceof ApiError ? error.message : "The server cannot be reached.";
    if (error.status === 401) openSettings("key");
    if (error.status === 503) setTimeout(showFacts, 1000);
  }
}

for (const idea of IDEAS) {
  const chip = make("button", "", idea);
  chip.type = "button";
  chip.addEventListener("click", () => send(idea));
  $("ideas").append(chip);
}
// an answer that a reload broke off is not waited for
for (const { messages } of store.conversations) {
  const last = messages.at(-1);
  if (last?.role === "assistant" && !last.note && !last.error) last.note = "stopped";
}
showTheme();
showList();
showLog();
working(false);
showFacts();
$("input").focus();
