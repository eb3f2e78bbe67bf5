// Light and dark: as the system says, until the reader chooses; and always light on paper.

const redraws = [];
const onRedraw = (draw) => redraws.push(draw);
const redrawAll = () => redraws.forEach((draw) => draw());

function startTheme() {
  const root = document.documentElement;
  const control = document.getElementById("tf-theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    control.textContent = isDark() ? "Light" : "Dark";
    control.setAttribute("aria-label", `Change to ${isDark() ? "light" : "dark"} colours`);
    redrawAll();
  };
  try {
    const kept = localStorage.getItem("trainfit-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch (error) {
    // A page from disk may not be allowed to keep anything: then it follows the system.
  }
  control.hidden = false;
  control.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("trainfit-theme", root.dataset.theme);
    } catch (error) {
      // As above.
    }
    show();
  });
  system.addEventListener("change", show);
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    redrawAll();
  });
  addEventListener("afterprint", () => {
    if (before === undefined) delete root.dataset.theme;
    else root.dataset.theme = before;
    redrawAll();
  });
  show();
}
